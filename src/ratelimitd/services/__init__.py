"""Handlers of the RPCs: messages in, messages out, over the limiter and the rule store. Imports no transport."""
