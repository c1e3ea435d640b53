"""What every serving engine needs, whatever its parts: contracts, the loop, the worker's frame. Imports no plugin."""
