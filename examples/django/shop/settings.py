"""Settings of a small shop. The two lines that were added for ratelimitd are marked."""

import os

SECRET_KEY = os.environ.get("SECRET_KEY", "an example's, worth nothing")
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
ROOT_URLCONF = "shop.urls"
MIDDLEWARE = [
    "ratelimitd_client.middleware.django.rate_limits",  # ratelimitd: 1 of 2
    "django.middleware.security.SecurityMiddleware",
    "django.middleware.common.CommonMiddleware",
]

NODE = os.environ.get("RATELIMITD", "127.0.0.1:9090")
TIMEOUT_S = float(os.environ.get("TIMEOUT_S", "0.02"))
RATELIMITD = {"target": NODE, "timeout_s": TIMEOUT_S}  # ratelimitd: 2 of 2
