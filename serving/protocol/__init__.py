"""What goes over the wire: request structs, the table of request fields, response bodies."""
