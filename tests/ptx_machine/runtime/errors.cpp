/// @file
/// Errors by name.
#include <cuda_runtime_api.h>

extern "C" {

const char* cudaGetErrorName(cudaError_t status) {
  switch (status) {
#define NAMED(name) \
  case name:        \
    return #name
    NAMED(cudaSuccess);
    NAMED(cudaErrorInvalidValue);
    NAMED(cudaErrorMemoryAllocation);
    NAMED(cudaErrorInitializationError);
    NAMED(cudaErrorCudartUnloading);
    NAMED(cudaErrorProfilerDisabled);
    NAMED(cudaErrorProfilerNotInitialized);
    NAMED(cudaErrorProfilerAlreadyStarted);
    NAMED(cudaErrorProfilerAlreadyStopped);
    NAMED(cudaErrorInvalidConfiguration);
    NAMED(cudaErrorInvalidPitchValue);
    NAMED(cudaErrorInvalidSymbol);
    NAMED(cudaErrorInvalidHostPointer);
    NAMED(cudaErrorInvalidDevicePointer);
    NAMED(cudaErrorInvalidTexture);
    NAMED(cudaErrorInvalidTextureBinding);
    NAMED(cudaErrorInvalidChannelDescriptor);
    NAMED(cudaErrorInvalidMemcpyDirection);
    NAMED(cudaErrorAddressOfConstant);
    NAMED(cudaErrorTextureFetchFailed);
    NAMED(cudaErrorTextureNotBound);
    NAMED(cudaErrorSynchronizationError);
    NAMED(cudaErrorInvalidFilterSetting);
    NAMED(cudaErrorInvalidNormSetting);
    NAMED(cudaErrorMixedDeviceExecution);
    NAMED(cudaErrorNotYetImplemented);
    NAMED(cudaErrorMemoryValueTooLarge);
    NAMED(cudaErrorStubLibrary);
    NAMED(cudaErrorInsufficientDriver);
    NAMED(cudaErrorCallRequiresNewerDriver);
    NAMED(cudaErrorInvalidSurface);
    NAMED(cudaErrorDuplicateVariableName);
    NAMED(cudaErrorDuplicateTextureName);
    NAMED(cudaErrorDuplicateSurfaceName);
    NAMED(cudaErrorDevicesUnavailable);
    NAMED(cudaErrorIncompatibleDriverContext);
    NAMED(cudaErrorMissingConfiguration);
    NAMED(cudaErrorPriorLaunchFailure);
    NAMED(cudaErrorLaunchMaxDepthExceeded);
    NAMED(cudaErrorLaunchFileScopedTex);
    NAMED(cudaErrorLaunchFileScopedSurf);
    NAMED(cudaErrorSyncDepthExceeded);
    NAMED(cudaErrorLaunchPendingCountExceeded);
    NAMED(cudaErrorInvalidDeviceFunction);
    NAMED(cudaErrorNoDevice);
    NAMED(cudaErrorInvalidDevice);
    NAMED(cudaErrorDeviceNotLicensed);
    NAMED(cudaErrorSoftwareValidityNotEstablished);
    NAMED(cudaErrorStartupFailure);
    NAMED(cudaErrorInvalidKernelImage);
    NAMED(cudaErrorDeviceUninitialized);
    NAMED(cudaErrorMapBufferObjectFailed);
    NAMED(cudaErrorUnmapBufferObjectFailed);
    NAMED(cudaErrorArrayIsMapped);
    NAMED(cudaErrorAlreadyMapped);
    NAMED(cudaErrorNoKernelImageForDevice);
    NAMED(cudaErrorAlreadyAcquired);
    NAMED(cudaErrorNotMapped);
    NAMED(cudaErrorNotMappedAsArray);
    NAMED(cudaErrorNotMappedAsPointer);
    NAMED(cudaErrorECCUncorrectable);
    NAMED(cudaErrorUnsupportedLimit);
    NAMED(cudaErrorDeviceAlreadyInUse);
    NAMED(cudaErrorPeerAccessUnsupported);
    NAMED(cudaErrorInvalidPtx);
    NAMED(cudaErrorInvalidGraphicsContext);
    NAMED(cudaErrorNvlinkUncorrectable);
    NAMED(cudaErrorJitCompilerNotFound);
    NAMED(cudaErrorUnsupportedPtxVersion);
    NAMED(cudaErrorJitCompilationDisabled);
    NAMED(cudaErrorUnsupportedExecAffinity);
    NAMED(cudaErrorUnsupportedDevSideSync);
    NAMED(cudaErrorContained);
    NAMED(cudaErrorInvalidSource);
    NAMED(cudaErrorFileNotFound);
    NAMED(cudaErrorSharedObjectSymbolNotFound);
    NAMED(cudaErrorSharedObjectInitFailed);
    NAMED(cudaErrorOperatingSystem);
    NAMED(cudaErrorInvalidResourceHandle);
    NAMED(cudaErrorIllegalState);
    NAMED(cudaErrorLossyQuery);
    NAMED(cudaErrorSymbolNotFound);
    NAMED(cudaErrorNotReady);
    NAMED(cudaErrorIllegalAddress);
    NAMED(cudaErrorLaunchOutOfResources);
    NAMED(cudaErrorLaunchTimeout);
    NAMED(cudaErrorLaunchIncompatibleTexturing);
    NAMED(cudaErrorPeerAccessAlreadyEnabled);
    NAMED(cudaErrorPeerAccessNotEnabled);
    NAMED(cudaErrorSetOnActiveProcess);
    NAMED(cudaErrorContextIsDestroyed);
    NAMED(cudaErrorAssert);
    NAMED(cudaErrorTooManyPeers);
    NAMED(cudaErrorHostMemoryAlreadyRegistered);
    NAMED(cudaErrorHostMemoryNotRegistered);
    NAMED(cudaErrorHardwareStackError);
    NAMED(cudaErrorIllegalInstruction);
    NAMED(cudaErrorMisalignedAddress);
    NAMED(cudaErrorInvalidAddressSpace);
    NAMED(cudaErrorInvalidPc);
    NAMED(cudaErrorLaunchFailure);
    NAMED(cudaErrorCooperativeLaunchTooLarge);
    NAMED(cudaErrorTensorMemoryLeak);
    NAMED(cudaErrorNotPermitted);
    NAMED(cudaErrorNotSupported);
    NAMED(cudaErrorSystemNotReady);
    NAMED(cudaErrorSystemDriverMismatch);
    NAMED(cudaErrorCompatNotSupportedOnDevice);
    NAMED(cudaErrorMpsConnectionFailed);
    NAMED(cudaErrorMpsRpcFailure);
    NAMED(cudaErrorMpsServerNotReady);
    NAMED(cudaErrorMpsMaxClientsReached);
    NAMED(cudaErrorMpsMaxConnectionsReached);
    NAMED(cudaErrorMpsClientTerminated);
    NAMED(cudaErrorCdpNotSupported);
    NAMED(cudaErrorCdpVersionMismatch);
    NAMED(cudaErrorStreamCaptureUnsupported);
    NAMED(cudaErrorStreamCaptureInvalidated);
    NAMED(cudaErrorStreamCaptureMerge);
    NAMED(cudaErrorStreamCaptureUnmatched);
    NAMED(cudaErrorStreamCaptureUnjoined);
    NAMED(cudaErrorStreamCaptureIsolation);
    NAMED(cudaErrorStreamCaptureImplicit);
    NAMED(cudaErrorCapturedEvent);
    NAMED(cudaErrorStreamCaptureWrongThread);
    NAMED(cudaErrorTimeout);
    NAMED(cudaErrorGraphExecUpdateFailure);
    NAMED(cudaErrorExternalDevice);
    NAMED(cudaErrorInvalidClusterSize);
    NAMED(cudaErrorFunctionNotLoaded);
    NAMED(cudaErrorInvalidResourceType);
    NAMED(cudaErrorInvalidResourceConfiguration);
    NAMED(cudaErrorUnknown);
#undef NAMED
    default:
      return "an error that the machine has no name for";
  }
}
const char* cudaGetErrorString(cudaError_t status) {
  return cudaGetErrorName(status);
}

}  // extern "C"
