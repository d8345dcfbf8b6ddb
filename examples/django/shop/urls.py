"""Routes of the shop."""

from django.urls import path

from shop import views

urlpatterns = [
    path("login", views.login),
    path("orders/<int:order_id>", views.order),
    path("healthz", views.healthz),
]
