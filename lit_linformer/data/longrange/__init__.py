"""Long Range Arena: ListOps and Pathfinder, which are generated; sources of rows; the data module."""
