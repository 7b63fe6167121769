"""A package, so that its fixtures of that scope end with it: Ray runs once per process."""
