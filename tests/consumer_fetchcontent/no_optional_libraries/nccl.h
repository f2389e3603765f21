#error "a core header includes <nccl.h>, which this machine has not"
