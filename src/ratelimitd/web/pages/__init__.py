"""The web pages: rules, audit, try, login, overview."""
