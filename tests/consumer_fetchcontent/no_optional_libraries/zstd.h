#error "a core header includes <zstd.h>, which this machine has not"
