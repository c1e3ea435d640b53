"""The engine: request pool, plan context and journal, the one loop, and the thread around it."""
