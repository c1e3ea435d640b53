"""One step in the worker: message, layout, runner, sampling, verification."""
