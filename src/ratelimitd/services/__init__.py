"""What the RPCs mean: messages in, messages out, over the limiter and the rule store. Never imports a transport."""
