"""Configuration: schema, composition, conversion, checks. Imports without torch; only `load` imports Hydra."""
