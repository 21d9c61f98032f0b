mod security_page;
