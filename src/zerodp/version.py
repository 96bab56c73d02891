"""The version of the library, which nothing has to import the library for."""

VERSION = "0.1.0"
