// Element types that the operators know.
#pragma once

namespace fc {

enum class Type { kFloat32, kBFloat16 };

}  // namespace fc
