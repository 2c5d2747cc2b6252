"""Studies: programs on top of the rest, that run it many times and make a table or a figure of it."""
