#define API(name) cuda##name
#include "fake_cudalike.h"
