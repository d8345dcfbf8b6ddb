"""Transports: pass bytes between the network and handlers. The services interpret the calls."""
