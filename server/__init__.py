"""The TinyLoop service: HTTP routers over one scheduler over one engine."""
