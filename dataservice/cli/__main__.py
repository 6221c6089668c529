"""`python -m dataservice.cli`, for where the console script is not on the path."""

from dataservice.cli.app import main

main()
