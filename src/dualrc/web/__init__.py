"""HTTP service and its web page, started by `dualrc serve`."""
