"""What requests are sent to: an engine in this process, a server of ours, any server with OpenAI's routes."""
