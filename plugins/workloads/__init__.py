"""Where the requests of an experiment come from: drawn by distributions, read from published traces or from files."""
