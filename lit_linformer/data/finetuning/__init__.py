"""Labelled texts: tasks, rows and their labels, encoded texts (→ memory-mapped tokens), row layout, data module."""
