#error "a core header includes <liburing.h>, which this machine has not"
