"""Studies: programs that run the rest of the package many times, and make tables and figures."""
