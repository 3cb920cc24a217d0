"""The five coursework sheets: experiments and answers."""
