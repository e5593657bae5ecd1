"""The HTTP server: app.py is routes, errors and bodies; handlers.py the endpoints; stream.py delivery."""
