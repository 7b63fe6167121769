"""Earlier names of what is in `trainer.tools`; configurations of earlier runs have them."""
