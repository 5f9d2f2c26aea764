"""New plugin packages: names that are free, and the templates of ``cookiecutter/`` rendered."""
