"""The HTTP server: app.py holds state and errors, body.py reads, handlers.py answers, stream.py delivers."""
