"""The state that nodes share, in Valkey or Redis: connections, scripts that run there, messages between nodes."""
