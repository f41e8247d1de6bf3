"""The HTTP service and the page on it; `dualrc serve` starts them."""
