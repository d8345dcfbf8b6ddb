"""A small shop. The three lines that were added for ratelimitd are marked."""

import os

from flask import Flask

from ratelimitd_client import RateLimiterClient  # ratelimitd: 1 of 3
from ratelimitd_client.middleware.flask import setup  # ratelimitd: 2 of 3

NODE = os.environ.get("RATELIMITD", "127.0.0.1:9090")
TIMEOUT_S = float(os.environ.get("TIMEOUT_S", "0.02"))

app = Flask(__name__)
setup(app, RateLimiterClient(NODE, timeout_s=TIMEOUT_S))  # ratelimitd: 3 of 3


@app.post("/login")
def login() -> dict[str, str]:
    """Nobody knows the password: five may try in a minute."""
    return {"detail": "wrong password"}


@app.get("/orders/<int:order_id>")
def order(order_id: int) -> dict[str, int]:
    """All orders are one endpoint, whatever their number."""
    return {"order": order_id}


@app.get("/healthz")
def healthz() -> str:
    """The rules know this one by its path, and allow it always."""
    return "ok"
