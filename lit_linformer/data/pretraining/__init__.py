"""Text without labels: corpus (source → documents), token files (→ memory-mapped tokens), masks, data module."""
