#error "a core header includes <xxhash.h>, which this machine has not"
