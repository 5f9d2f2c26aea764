"""{{ cookiecutter.summary }}"""
