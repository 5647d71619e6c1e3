"""What people read: tables and reports made from the evidence."""
