#error "a core header includes <isa-l/erasure_code.h>, which this machine has not"
