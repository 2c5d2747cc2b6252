"""Long Range Arena: ListOps and Pathfinder, which are generated; where rows come from; the data module."""
