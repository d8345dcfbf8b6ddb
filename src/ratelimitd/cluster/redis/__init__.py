"""Valkey and Redis: connections, topologies, messages between nodes, and the scripts that run in the server."""
