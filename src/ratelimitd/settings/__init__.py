"""Every setting: name, default, bounds, meaning, and the sources its value comes from."""
