"""Reports: tables, figures, HTML and Markdown made from a run's rows alone, on any machine, without MLX."""
