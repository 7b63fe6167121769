"""`python -m trainer --dry-run`: what a configuration needs, before anything is started."""
