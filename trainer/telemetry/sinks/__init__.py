"""Where metrics go. One file per destination; `build.py` makes those that the configuration asks for."""
