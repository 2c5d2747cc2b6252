"""What every other part may use, and nothing of them."""
