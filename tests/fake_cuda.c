/* Answers "this process has no accelerator" in place of torch, so that its CUDA build runs backward
   passes of fake CUDA tensors on a machine without a GPU. Loaded with LD_PRELOAD before torch. */

/* std::optional<c10::DeviceType> at::accelerator::getAccelerator(bool) */
unsigned short _ZN2at11accelerator14getAcceleratorEb(char checked) { return 0; }

/* bool at::accelerator::isAccelerator(c10::DeviceType) */
char _ZN2at11accelerator13isAcceleratorEN3c1010DeviceTypeE(char type) { return 0; }
