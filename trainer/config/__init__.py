"""Configuration: schema, composition, checks. Imports without torch; only `compose` imports Hydra."""
