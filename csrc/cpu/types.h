// Element types that CPU operators know.
#pragma once

namespace fc {

enum class Type { kFloat32, kBFloat16 };

}  // namespace fc
