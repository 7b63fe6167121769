#define API(name) cuda##name
#define VISIBLE "CUDA_VISIBLE_DEVICES"
#define MAY_EXPORT 1
#define MAY_OPEN(handle) 1
#include "fake_cudalike.h"
