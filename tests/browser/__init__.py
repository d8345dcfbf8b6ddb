"""The pages of real nodes in a real Chromium: what an operator sees and does there, and what a browser refuses."""
