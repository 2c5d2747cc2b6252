"""Studies: programs on top of the rest, which run it many times and make tables and figures."""
