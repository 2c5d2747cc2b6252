"""Run folders and trained models: finding, checking, claiming, writing and reading them."""
