"""Learning: losses, advantages and corrections as free functions, and the updates that use them."""
